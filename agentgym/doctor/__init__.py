"""`agentgym doctor`: probes of packages, hardware, sandboxes and data, each in a thread with a time limit.

Probes that may crash or hang an interpreter (torch, a driver's program) run in a child process.
"""
