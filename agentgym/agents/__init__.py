"""Agents that play whole episodes by themselves: a command or a Python function, in front of a gateway.

An agent asks the model at the gateway by any of its protocols, and acts on the environment by its tools, at the gateway too.
"""
