"""`agentgym doctor`: checks of packages, hardware, sandboxes and data, with a remedy for each problem.

Every part is looked at by a function of its own that gives findings. All look at once, each in a thread with a time limit, and
what may crash or hang an interpreter (torch, a driver's program) runs in a process of its own. Nothing is contacted but the
Docker Engine that would be used anyway; the Hugging Face hub only when asked for.
"""
