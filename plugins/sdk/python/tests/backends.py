"""Plugin programs for tests: python backends.py MODE."""

import os
import subprocess
import sys
import threading

import terminus_plugin as tp

MODE = sys.argv[1]


class Backend(tp.Backend):
    def info(self):
        if MODE == "prints":
            print("from info")
            os.write(1, b"straight to descriptor 1\n")
        return tp.Info("modes", "1.0.0")

    def start(self, s):
        self.s = s
        if MODE == "prints":
            print("x" * 200_000)  # more than a pipe holds
            os.write(1, b"y" * 200_000)
            subprocess.run(["echo", "from a child"], check=True)
        if MODE == "child":
            child = subprocess.Popen(["sleep", "600"])
            return str(child.pid).encode()
        return b""

    def add_region(self, r):
        if MODE == "fatal":
            self.s.fatal("the device fell off the bus")
        if MODE == "stuck":
            print("registering", flush=True)
            threading.Event().wait()

    def add_peer(self, p):
        return tp.Lane.SHM

    def transfer(self, op):
        op.done(tp.Lane.SHM)

    def close(self):
        if MODE == "close-raises":
            raise RuntimeError("cannot close")


if __name__ == "__main__":
    tp.serve(Backend())
