"""pip, for an interpreter that has none: one release, checked, from the package index."""

import hashlib
import os
import re
import runpy
import sys
import tempfile
import urllib.parse
import urllib.request

WHEEL = "pip-26.3-py3-none-any.whl"
SHA256 = "f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13"
PAGE = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/pip/"
INSTEAD = "install Debian's or Ubuntu's package python3-venv, and do this again"

try:
    with urllib.request.urlopen(PAGE, timeout=60) as answer:
        page = answer.read().decode()
    links = re.findall(rf'href="([^"#]*{re.escape(WHEEL)})', page)
    if not links:
        sys.exit(f"there is no {WHEEL} at {PAGE}: {INSTEAD}")
    with urllib.request.urlopen(urllib.parse.urljoin(PAGE, links[0]), timeout=60) as answer:
        wheel = answer.read()
except OSError as error:
    sys.exit(
        f"this Python has no ensurepip, and pip cannot be had from {PAGE} ({error}): {INSTEAD}"
    )
if hashlib.sha256(wheel).hexdigest() != SHA256:
    sys.exit(f"{links[0]} is not the {WHEEL} that this was tried with: {INSTEAD}")
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, WHEEL)
    with open(path, "wb") as file:
        file.write(wheel)
    sys.path.insert(0, path)  # it can be run as it is packed
    sys.argv = ["pip", "install", "--quiet", "--no-index", "--no-deps", path]
    runpy.run_module("pip", run_name="__main__")
