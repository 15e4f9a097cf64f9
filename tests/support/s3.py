"""An S3 server on the loopback interface in a separate process, and the settings for its clients."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_SERVE = """
import logging, sys
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until the test process exits, for whatever reason
server.stop()
"""


@dataclass(frozen=True)
class S3Server:
    """A running S3 server.

    Attributes:
        url: The address of the server.
    """

    url: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which s3fs, and other libraries built on botocore, use this server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "2",
        }

    def check_credentials(self, check: bool) -> None:
        """Make the server reject all credentials if ``check`` is true (it has issued none), or else accept any."""
        count = "0" if check else "inf"
        plain = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.url}/moto-api/reset-auth", count.encode(), plain, method="POST")
        with urllib.request.urlopen(request, timeout=120):
            pass


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run a server for the duration of the context."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            while not (line := process.stdout.readline()).strip().isdigit():
                assert line, "the server exited"
            yield S3Server(f"http://127.0.0.1:{int(line)}")
        finally:
            process.stdin.close()
            process.wait(300)
