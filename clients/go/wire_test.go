package client

import (
	"encoding/json"
	"reflect"
	"testing"
)

// Answers that are read without json are read as json reads them.
func TestPlainAnswers(t *testing.T) {
	for text, plain := range map[string]bool{
		`{"t":"ok","seq":1}`: true,
		`{"t":"ok","seq":12,"slot":65535,"opener":281474976710655}`:               true,
		`{"t":"ok","seq":7,"aux":64}`:                                             true,
		`{"t":"ok","seq":7,"aux":0}`:                                              true,
		`{"t":"ok","seq":0}`:                                                      true,
		`{"t":"ok","seq":1} `:                                                     false,
		`{"t":"ok","seq":01}`:                                                     false,
		`{"t":"ok","seq":1.0}`:                                                    false,
		`{"t":"ok","seq":}`:                                                       false,
		`{"t":"ok","seq":18446744073709551615}`:                                   false,
		`{"t":"ok","seq":7,"slot":4294967296,"opener":1}`:                         false,
		`{"t":"ok","seq":7,"slot":1}`:                                             false,
		`{"t":"ok","seq":7,"slot":1,"opener":1,"aux":3}`:                          false,
		`{"t":"ok","seq":7,"ended":true,"reason":"peer_aborted"}`:                 false,
		`{"t":"error","seq":7,"code":"limit","field":"","rule":"","message":"x"}`: false,
		`{"seq":7,"t":"ok"}`:                                                      false,
		`{"t":"ok","seq":7`:                                                       false,
	} {
		var got, want answer
		if got.plain([]byte(text)) != plain {
			t.Errorf("%s: plain is %t", text, !plain)
			continue
		}
		if !plain {
			continue
		}
		if err := json.Unmarshal([]byte(text), &want); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, json %+v, %v", text, got, want, err)
		}
	}
}
