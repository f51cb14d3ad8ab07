"""Whether the connections of a run are encrypted, and the certificate that it makes for them (driver)."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from tritium.errors import BadSetting
from tritium.tls import Certificate

ENCRYPTED = ("spark.network.crypto.enabled", "spark.ssl.rpc.enabled", "spark.authenticate.enableSaslEncryption")
"""The settings by which Spark encrypts its own connections; they do not inherit `spark.ssl.enabled`, which is for its
pages."""


def certificate_of(tls: bool | None, note: Callable[[str], None], spark: Any = None) -> Certificate | None:
    """Return a new certificate where `tls` or, without it, Spark's settings ask for one; else None.

    spark : the session; None where ranks run on this machine.

    Raises BadSetting for tls=True without the package `cryptography`. Where only Spark's settings ask, it is noted.
    """
    settings = [] if spark is None else [n for n in ENCRYPTED if str(spark.conf.get(n, "")).strip().lower() == "true"]
    if not (settings if tls is None else tls):
        return None
    try:
        return new_certificate()
    except ImportError as error:
        reason = 'the driver has no cryptography, which makes the certificate: pip install "tritium[tls]" there'
        if tls:
            raise BadSetting(f"tls=True: {reason}. Executors need nothing.", setting="tls") from error
        note(
            f"{settings[0]}=true encrypts Spark's own connections, and those of the ranks' tasks to the driver are not "
            f"encrypted: {reason}, or say tls=False"
        )
        return None


def new_certificate() -> Certificate:
    """Make a certificate that signs itself, and its key. Raises ImportError without the package `cryptography`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    unsigned = (
        x509.CertificateBuilder()
        .issuer_name(name)
        .subject_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # At any time: clients accept this one alone, their clocks may differ, and a run may take weeks.
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Certificate(
        unsigned.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode(), private.decode()
    )
