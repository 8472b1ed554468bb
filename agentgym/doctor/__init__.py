"""`agentgym doctor`: checks of packages, hardware, sandboxes and data, with a remedy for each problem.

Each probe is a function that returns findings. All run at once, each in a thread with a time limit. Checks that may crash or
hang an interpreter (torch, a driver's program) run in a child process. Only the Docker Engine is contacted, and with --network
the Hugging Face hub.
"""
