"""`openenv validate` up to its last level, of a folder and the image that was built of it: `validate_image.py FOLDER IMAGE`.

Its own provider builds the image with no choice of the base, and reaches the container by the engine's bridge; where there is
neither registry nor bridge, the container stands on the host's network, as hardened as there. The report is printed as JSON.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

from openenv.validation import run_validation, write_report
from openenv.validation.providers import StartupError
from openenv.validation.providers.docker import DockerRunningSubject
from openenv.validation.types import ProviderCapability


def docker(*words):
    return subprocess.run(["docker", *words], capture_output=True, text=True, timeout=60, check=True)


class OnTheHost:
    name = "docker-on-the-host"
    capabilities = frozenset({ProviderCapability.IMAGE_BUILD, ProviderCapability.EXEC})
    supported_network_modes = frozenset({"public"})

    def __init__(self, image):
        self.image = image

    def build(self, root, execution):
        assert (root / execution.dockerfile).is_file()
        return self.image

    def start(self, spec):
        subject = DockerRunningSubject(f"openenv-{spec.run_id}", spec)
        kept = [
            "--name",
            subject.name,
            "--label",
            f"org.openenv.validation.run={spec.run_id}",
            "--init",
            "--network=host",
        ]
        hardened = ["--user=65532:65532", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
        memory = f"{spec.resources.memory_mb}m"
        bounds = ["--pids-limit=256", "--memory", memory, "--memory-swap", memory, "--cpus", str(spec.resources.cpu)]
        disk = f"/tmp:rw,nosuid,nodev,size={spec.resources.disk_mb << 20},mode=1777"
        docker(
            "create", *kept, *hardened, *bounds, "--tmpfs", disk, "--env=PORT=0", "--env=PYTHONUNBUFFERED=1", self.image
        )
        try:
            docker("start", subject.name)
            subject.base_url = url_of(subject.name)
        except BaseException:
            subject.stop()
            raise
        return subject


def url_of(container):
    """Where a container on the host's network serves, once it does."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        runs = docker("inspect", "--format", "{{.State.Running}}", container).stdout.strip() == "true"
        said = docker("logs", container)
        if found := re.search(r"running on http://0\.0\.0\.0:(\d+)", said.stdout + said.stderr):
            return f"http://127.0.0.1:{found[1]}"
        if not runs:
            break
        time.sleep(0.05)
    raise StartupError(f"no server: {said.stdout}{said.stderr}")


if __name__ == "__main__":
    sys.stdout.write(write_report(run_validation(Path(sys.argv[1]), provider=OnTheHost(sys.argv[2])), None))
