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
//
// Where ranks share the heads of the model, each head of a page has content of its own, in rows of one token:
// [token][head], of the heads that the rank has.
type content struct {
	seed              uint64
	size              int    // of one head of one tensor's page
	rows              int    // tokens of a page
	heads, first, all int    // of this rank, from which on, of the model
	tile              []byte // tileBytes random bytes, continued from the front for one page
}

// newContent is of one rank of so many.
func newContent(h PlanHeader, rank, size int) *content {
	c := &content{seed: mix(h.Seed), size: h.PageBytes / h.Heads, rows: h.PageTokens, heads: h.Heads / size, first: rank * h.Heads / size, all: h.Heads}
	c.tile = make([]byte, tileBytes+c.size)
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

// page is what one head of one tensor's page holds; column is tensor*all + head.
func (c *content) page(room int64, page, column int) (header [headerBytes]byte, body []byte) {
	h := mix(mix(c.seed^uint64(room)) + uint64(page)<<8 + uint64(column))
	binary.LittleEndian.PutUint64(header[0:], uint64(room))
	binary.LittleEndian.PutUint32(header[8:], uint32(page))
	binary.LittleEndian.PutUint32(header[12:], uint32(column))
	binary.LittleEndian.PutUint64(header[16:], h)
	at := int(h>>16) & (tileBytes/8 - 1) * 8
	return header, c.tile[at+headerBytes : at+c.size]
}

// fill writes the content into dst, one tensor's page.
func (c *content) fill(dst []byte, room int64, page, tensor int) {
	if c.heads == 1 {
		c.fillHead(dst, room, page, tensor*c.all+c.first)
		return
	}
	one, row := make([]byte, c.size), c.size/c.rows
	for h := range c.heads {
		c.fillHead(one, room, page, tensor*c.all+c.first+h)
		for t := range c.rows {
			copy(dst[(t*c.heads+h)*row:][:row], one[t*row:])
		}
	}
}

func (c *content) fillHead(dst []byte, room int64, page, column int) {
	header, body := c.page(room, page, column)
	copy(dst, header[:])
	copy(dst[headerBytes:], body)
}

// holds reports whether src, one tensor's page, holds the content.
func (c *content) holds(src []byte, room int64, page, tensor int) bool {
	if c.heads == 1 {
		return c.headHolds(src, room, page, tensor*c.all+c.first)
	}
	one, row := make([]byte, c.size), c.size/c.rows
	for h := range c.heads {
		for t := range c.rows {
			copy(one[t*row:][:row], src[(t*c.heads+h)*row:])
		}
		if !c.headHolds(one, room, page, tensor*c.all+c.first+h) {
			return false
		}
	}
	return true
}

func (c *content) headHolds(src []byte, room int64, page, column int) bool {
	header, body := c.page(room, page, column)
	return bytes.Equal(src[:headerBytes], header[:]) && bytes.Equal(src[headerBytes:], body)
}
