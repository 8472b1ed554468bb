#!/usr/bin/env bash
# Installs the Chromium that the tests of the viewer's page drive, on Debian. Playwright's own browsers are not needed.
set -euo pipefail
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core </dev/null
chromium --version
