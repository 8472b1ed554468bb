"""Images that others publish, made ready: writable for the agent, with one commit for a history, and without hidden tests.

Theirs belong to root, and in their repositories are future commits, tags, remotes and reflogs, from which an agent could copy.
`files` are those of an image's folder: a Dockerfile on the published image, and the script that changes it once for all.
"""

from agentgym_envs.swe_bench.instance import Instance
from agentgym_envs.swe_bench.upstream import needs_swebench

_DOCKERFILE = """\
FROM {image}
USER root
{more}COPY prepare.sh bug.patch /agentgym/
RUN bash /agentgym/prepare.sh {what}
"""
# For other languages than Python: what the image sets for its programs, and packages that they keep in root's folder or in
# Cargo's. Sandboxes need Python.
_OTHERS = """\
RUN export -p > /etc/testbed-environment
RUN command -v python3 || (apt-get update && apt-get install --yes --no-install-recommends python3)
RUN for folder in /root /usr/local/cargo; do if [ -d $folder ]; then chmod -R a+rwX $folder; fi; done
"""
# What R2E-Gym's images hold of an instance's solution; its tests, which are run from the repository's root, and their command.
_TOLD = "syn_issue expected_test_output execution_result parsed_commit modified_files modified_entities"
_TESTS = "/r2e_tests /testbed/r2e_tests /testbed/run_tests.sh"
_SCRIPT = f"""\
set -euo pipefail
shopt -s inherit_errexit
cd /testbed
own=/agentgym
git config --system --replace-all safe.directory '*'
export HOME=/nonexistent GIT_CONFIG_GLOBAL=/dev/null
if [ -s $own/bug.patch ]; then git apply --whitespace=nowarn $own/bug.patch; fi
mkdir -m 700 $own/tests
if [ "$1" != all ]; then
  for path in {_TESTS}; do
    if [ -L $path ]; then rm $path; elif [ -e $path ]; then mv $path $own/tests/; fi
  done
  for name in {_TOLD}; do rm -f $name.json; done
fi
# The files that git tracks, ignored ones too, and those it would add; of submodules and repositories inside, their files.
git ls-files -s -z | (grep -zv '^160000 ' || true) | cut -z -f 2- > $own/tracked
ignored=$(cat .git/info/exclude 2>/dev/null || true)
find . -name .git -prune -exec rm -rf {{}} +
git init --quiet --template=
git symbolic-ref HEAD refs/heads/main
for setting in logAllRefUpdates=false checkStat=minimal trustctime=false; do git config core.${{setting%=*}} ${{setting#*=}}; done
git config gc.auto 0
mkdir -p .git/info
printf '%s\\n' "$ignored" .venv/ __pycache__/ '*.pyc' .pytest_cache/ /r2e_tests /run_tests.sh > .git/info/exclude
git add --all
git update-index --add --remove -z --stdin < $own/tracked
git -c user.name=SWE-bench -c user.email=swe@bench commit --quiet --no-verify --allow-empty \\
  --message='The repository before the issue was resolved'
git repack -a -d --quiet
rm -f .git/COMMIT_EDITMSG
if [ "$1" = tests ]; then find $own/tests -mindepth 1 -maxdepth 1 -exec mv {{}} . \\; ; fi
rm -rf $own
# The programs of a sandbox have a user id of its own. Python may lie in root's folder.
find . -path ./.venv -prune -o ! -type l ! -perm -o=w -exec chmod a+rwX {{}} +
if [ -d /root ]; then chmod a+x /root; fi
if [ -d /root/.local ]; then find /root/.local ! -type l ! -perm -o=r -exec chmod a+rX {{}} +; fi
"""


def files(instance: Instance, image: str, tests: bool) -> dict[str, str]:
    """The files of the image's folder by their names. `tests`: with the tests that R2E-Gym's images hold, to grade."""
    hides = instance.expected is not None
    more = _OTHERS if needs_swebench(instance) else ""
    dockerfile = _DOCKERFILE.format(image=image, more=more, what=("tests" if tests else "none") if hides else "all")
    return {"Dockerfile": dockerfile, "prepare.sh": _SCRIPT, "bug.patch": instance.bug_patch}
