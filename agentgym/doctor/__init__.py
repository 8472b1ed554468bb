"""`agentgym doctor`: probes of packages, hardware, sandboxes and data, each in a thread with a time limit.

What may crash or hang an interpreter (torch, a driver's program) runs in a child process.
"""
