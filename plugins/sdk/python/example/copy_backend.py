"""A whole backend: it copies between the memory of two engines on one machine. Read it as the tutorial for
a backend of your own; the README says how to run it."""

import terminus_plugin as tp
from terminus_plugin.shm import Share

PIECE = 1 << 20  # bytes between two looks at op.stop


class CopyBackend(Share, tp.Backend):
    """Share has the regions and peers: it maps the memory of peers and lets them map ours."""

    def info(self) -> tp.Info:
        return tp.Info("copy", "1.0.0", features=[tp.BYTE_PROGRESS, tp.STRIDED, tp.LAYER_RANGE])

    def start(self, s: tp.Start) -> bytes:
        """Return what peers get in add_peer: where to connect."""
        self.listen(s)
        return self.endpoint

    def transfer(self, op: tp.Op) -> None:
        """Runs on a thread of its own and ends the op exactly once. quiet is True throughout: when it
        returns, nothing of the op can land any more."""
        moved = 0
        try:
            for c in op.pieces(PIECE):
                if op.stop:
                    return op.aborted(quiet=True)
                op.peer.data.write(c.dst_region, c.dst_off, c.src, c.src_off, c.len, op)
                moved += c.len
                op.progress(moved)
        except tp.Error as e:
            return op.fail_error(e, quiet=True)
        op.done(tp.Lane.SHM)


if __name__ == "__main__":
    tp.serve(CopyBackend())
