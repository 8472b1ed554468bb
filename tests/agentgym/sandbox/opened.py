"""Opening a sandbox of a back end that a test names."""

RUN = "tests"


def open_on(backend, spec):
    if backend.startswith("http"):
        from agentgym.sandbox.backends.remote import open_remote

        return open_remote(backend, spec, RUN)
    if backend == "docker":
        from agentgym.sandbox.backends.docker import open_docker

        return open_docker(spec, RUN)
    from agentgym.sandbox.backends.bubblewrap import open_bubblewrap

    return open_bubblewrap(spec, RUN)
