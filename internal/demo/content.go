package demo

import (
	"bytes"
	"encoding/binary"
)

const (
	tileBytes   = 64 << 10 // the random bytes that contents are cut from
	headerBytes = 24       // room, page, tensor, hash: at the front of each tensor's page
)

// content makes and checks what a page holds: a function of seed, room, page of the prompt and
// tensor, so that a page of another room, another page of this one, or the right page in the wrong
// tensor is told apart. worker.py computes the same bytes.
type content struct {
	seed uint64
	size int    // of one tensor's page
	tile []byte // tileBytes random bytes, continued from the front for one page
}

func newContent(h PlanHeader) *content {
	c := &content{seed: mix(h.Seed), size: h.PageBytes, tile: make([]byte, tileBytes+h.PageBytes)}
	x := c.seed
	for i := 0; i < tileBytes; i += 8 {
		x += 0x9e3779b97f4a7c15
		binary.LittleEndian.PutUint64(c.tile[i:], mix(x))
	}
	for n := tileBytes; n < len(c.tile); {
		n += copy(c.tile[n:], c.tile[:tileBytes])
	}
	return c
}

// mix is the finalizer of splitmix64.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func (c *content) page(room int64, page, tensor int) (header [headerBytes]byte, body []byte) {
	h := mix(mix(c.seed^uint64(room)) + uint64(page)<<8 + uint64(tensor))
	binary.LittleEndian.PutUint64(header[0:], uint64(room))
	binary.LittleEndian.PutUint32(header[8:], uint32(page))
	binary.LittleEndian.PutUint32(header[12:], uint32(tensor))
	binary.LittleEndian.PutUint64(header[16:], h)
	at := int(h>>16) & (tileBytes/8 - 1) * 8
	return header, c.tile[at+headerBytes : at+c.size]
}

// fill writes the content into dst, one tensor's page.
func (c *content) fill(dst []byte, room int64, page, tensor int) {
	header, body := c.page(room, page, tensor)
	copy(dst, header[:])
	copy(dst[headerBytes:], body)
}

// holds reports whether src, one tensor's page, holds the content.
func (c *content) holds(src []byte, room int64, page, tensor int) bool {
	header, body := c.page(room, page, tensor)
	return bytes.Equal(src[:headerBytes], header[:]) && bytes.Equal(src[headerBytes:], body)
}
