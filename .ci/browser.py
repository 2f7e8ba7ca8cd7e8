"""Install Debian's Chromium for the tests of the report page, where that can be done; elsewhere those tests are counted skips."""

from __future__ import annotations

import os
import shutil
import subprocess

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
INSTALL = ("apt-get", "install", "--yes", "--quiet", "--no-install-recommends", "chromium", "fonts-dejavu-core")
LIMIT_SECONDS = 300


def main() -> None:
    """Leave it where it is, or try once."""
    if any(map(shutil.which, BROWSERS)):
        return
    if os.name != "posix" or os.geteuid() != 0 or not shutil.which("apt-get"):
        print("No Chromium here: the tests of the page in a browser are skipped.", flush=True)
        return
    print("Installing Chromium for the tests of the page (once) ...", flush=True)
    quiet = {"env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, "stdout": subprocess.DEVNULL, "timeout": LIMIT_SECONDS}
    try:
        for command in (("apt-get", "update", "--quiet"), INSTALL):
            subprocess.run(command, check=True, **quiet)
    except (OSError, subprocess.SubprocessError):
        print("It cannot be installed: the tests of the page in a browser are skipped.", flush=True)


if __name__ == "__main__":
    main()
