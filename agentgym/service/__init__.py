"""Environments as services over WebSockets and HTTP; each session has a process, or shares one with others.

`server/` is the server, `worker/` the process of sessions, `client/` what `agentgym.make(URL)` uses, `protocol/` the
messages, `openenv/` OpenEnv's protocol on both sides.
"""
