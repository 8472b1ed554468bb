"""Fault doubles for the tests of the pool: sandboxes that run nothing, slow, dying or impossible to make as a test says."""

import threading
import time

from agentgym.sandbox.api import SandboxError, SandboxSpec


class Box:
    """Stands for a sandbox: counts what is done to it."""

    def __init__(self, maker):
        self.id = f"box-{len(maker.made)}"
        self.spec = SandboxSpec()
        self.maker = maker
        self.alive = True
        self.resets = 0
        self.users = 0
        self.dirty = False
        self.ping_seconds = 0.0

    def ping(self, timeout=10.0):
        time.sleep(self.ping_seconds)
        if not self.alive:
            raise SandboxError("gone")

    def reset(self):
        self.resets += 1
        time.sleep(self.maker.reset_seconds)
        if self.maker.reset_fails:
            self.alive = False
            raise SandboxError("a process cannot be removed")
        self.dirty = False

    def close(self):
        time.sleep(self.maker.close_seconds)
        self.alive = False
        self.maker.closed.append(self)


class Maker:
    """Makes boxes, and has faults that tests switch on."""

    def __init__(self):
        self.made, self.closed, self.attempts = [], [], 0
        self.seconds = self.reset_seconds = self.close_seconds = 0.0
        self.error = None
        self.reset_fails = False
        self.making = self.most_making = 0
        self.lock = threading.Lock()

    def __call__(self):
        with self.lock:
            self.attempts += 1
            self.making += 1
            self.most_making = max(self.most_making, self.making)
        try:
            time.sleep(self.seconds)
            if self.error:
                raise self.error
            with self.lock:
                self.made.append(Box(self))
                return self.made[-1]
        finally:
            with self.lock:
                self.making -= 1

    @property
    def living(self):
        return [box for box in self.made if box.alive]


def box_of(lease):
    return lease.box
