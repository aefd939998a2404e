"""How clients are made: certificates are read where a server has to prove who it is, and nowhere else."""

from __future__ import annotations

import ssl

import pytest

from tunesmith.core.http import client_options


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://gpu.example"])
def test_plain_http_reads_no_certificates_and_trusts_nobody_by_tls(url: str) -> None:
    verify = client_options(url, 5.0)["verify"]
    assert (verify.verify_mode, verify.check_hostname, verify.cert_store_stats()["x509_ca"]) == (
        ssl.CERT_REQUIRED,
        True,
        0,
    )


@pytest.mark.parametrize("url", ["https://gpu.example", "HTTPS://gpu.example", "HTTP://gpu.example"])
def test_anything_else_is_checked_as_the_client_does_by_default(url: str) -> None:
    assert "verify" not in client_options(url, 5.0)
