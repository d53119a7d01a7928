// Package shm shares worker memory between the plugin processes of one machine: each maps the regions
// of its peers and copies into them. A backend that embeds a *Share has everything but Info, Start and
// Transfer:
//
//	type backend struct{ *shm.Share }
//
//	func (b *backend) Start(_ context.Context, s sdk.Start) (endpoint []byte, err error) {
//		b.Share, err = shm.Listen(s)
//		return b.Share.Endpoint(), err
//	}
//
// plugins/sdk/example/copy is a whole one.
//
// Whoever maps a region holds its descriptor and its lease, so that the engine that owns the memory
// sees for itself when nobody can write to it any more. A peer that dies takes its mappings with it; one
// that hangs delays the removal of a region for as long as it does: a mapping that is there is not denied on a
// timer.
//
// # Wire protocol, version 1
//
// The owner of regions listens, writers connect: one connection for each peer that a writer was told of
// (PeerAdd). The socket is AF_UNIX, SOCK_SEQPACKET: one record is one message. Numbers are
// little-endian. Each end compares the user id of the other (SO_PEERCRED) with its own and goes away
// when they differ.
//
// The endpoint (HandshakeResponse.endpoint) of an owner is the text "shm1:" and the absolute path of its
// socket, which lies in its runtime directory, mode 0600.
//
// The first record comes from the writer, 56 bytes:
//
//	offset  0  8 bytes   "TSHM1\0\0\0"
//	offset  8  u64       incarnation of the writer's engine
//	offset 16  u32       epoch of the writer's plugin
//	offset 20  u32       0
//	offset 24  32 bytes  PeerAdd.token
//
// Every other record has 24 bytes:
//
//	offset  0  u32       kind
//	offset  4  u32       code, 0 except where the table says so
//	offset  8  u64       region, 0 in WELCOME
//	offset 16  u64       size, 0 except in MAPPED
//
//	kind           from    meaning
//	1  WELCOME     owner   answers the hello. A writer that PeerAccept has not yet named is kept waiting
//	                       for at most 5 s. Code 0: admitted. Else the owner closes afterwards
//	2  MAP         writer  asks for a region; not for one that it has on this connection
//	3  MAPPED      owner   answers MAP, in the order of the questions. Code 0: size is that of the region,
//	                       and two descriptors come along (SCM_RIGHTS): memory, lease. Else no descriptors
//	4  WITHDRAW    owner   the region goes. The writer lets running copies end, unmaps, closes both
//	                       descriptors and answers UNMAPPED. Never before the region's MAPPED
//	5  UNMAPPED    writer  nothing of the writer can touch the region any more. Also legal unasked
//
//	code
//	1  the region is not shared (never was, or not any more)
//	2  the writer is not admitted (token, incarnation or epoch)
//	3  too many connections
//
// A writer maps exactly size bytes from offset 0, MAP_SHARED, MADV_DONTFORK, after it has checked that the
// memory is a memfd sealed SHRINK, GROW and SEAL, not hugetlb, and of at least that size. Descriptors are
// close-on-exec at both ends.
//
// Closing: the owner shuts its sending half down (SHUT_WR) to dismiss a writer. A writer that reads the
// end of the stream lets running copies end, unmaps everything that came by this connection, closes all
// its descriptors and then the socket. It never closes the socket earlier: to the owner the end of the
// stream is the proof that the writer has let go. (The kernel closes the socket of a process that died
// after its mappings.) A record of another form ends the connection, with descriptors closed.
package shm
