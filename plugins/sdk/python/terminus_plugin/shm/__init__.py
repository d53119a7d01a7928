"""Share worker memory between the plugin processes of one machine: each maps the regions of its peers and
copies into them. A backend that inherits from Share has everything but info, transfer, and a start that
calls listen:

    class Copy(Share, tp.Backend):
        def start(self, s):
            self.listen(s)
            return self.endpoint

Whoever maps a region holds its descriptor and its lease, so that the engine that owns the memory sees for
itself when nobody can write to it any more. A peer that dies takes its mappings with it; one that hangs
delays the removal of a region by at most WITHDRAW_BOUND.

The wire protocol is that of the Go package plugins/sdk/shm, whose documentation has its tables: backends in
the two languages copy into each other's memory.
"""

from .remote import Remote, Window
from .share import WITHDRAW_BOUND, Share

__all__ = ["Remote", "Share", "WITHDRAW_BOUND", "Window"]
