from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cellar.core.extras import command
from tests.limits import SECONDS


@pytest.mark.long
def test_without_the_server_extra_one_sentence_says_what_to_install() -> None:
    """A fresh process in which uvicorn cannot be imported, as after a plain install."""
    code = (
        "import sys\n"
        "sys.modules['uvicorn'] = None\n"
        "sys.argv = ['cellar', 'serve']\n"
        "from cellar.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("run " + command("server"))
    assert "uvicorn" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_serves_on_when_nobody_reads_where_it_is() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = (
        "import sys; from cellar.cli.serve import _say; _say('here'); _say('there'); print('goes on', file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=SECONDS
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "goes on\n")
