"""Environments as services: one process a session, spoken to over WebSockets.

`server.py` is the server, `worker.py` the process of one session, `frames.py` what is said between client and server.
"""
