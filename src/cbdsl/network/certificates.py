"""X.509 for a swarm: an authority, certificates for brokers and clients, and a revocation list."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cbdsl.errors import UserError
from cbdsl.network.tls import Identity

AUTHORITY_DAYS = 7300
_LEAST_RSA_BITS = 2048
_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)  # brokers refuse others in the handshake, or may
_MOST_REQUEST_BYTES = 2**16
MAKE_REQUEST = (
    "openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout worker.key -subj /CN=worker "
    "-out worker.csr"
)
_BACKDATED = timedelta(days=1)  # the clocks of small devices may be behind
_LONGEST_NAME = 64  # of a common name; a host's whole name is among the alternative names


RequestedKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey
"""A public key for which a device asks for a certificate."""


@dataclass(frozen=True)
class IssuedCertificate:
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes  # empty if the device made the key itself


@dataclass(frozen=True)
class Authority:
    """The authority of a swarm: its key can create members."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @staticmethod
    def new(organization: str) -> Authority:
        """Create an authority (P-256) that may sign members and lists, but no further authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(organization, "authority")
        end = datetime.now(UTC) + timedelta(days=AUTHORITY_DAYS)
        builder = _builder(name, name, key.public_key(), key, end)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs_others=True), critical=True)
        return Authority(builder.sign(key, hashes.SHA256()), key)

    @staticmethod
    def load(certificate: bytes, key: bytes) -> Authority:
        """Read the output of `pem`; ValueError if it is something else."""
        loaded = serialization.load_pem_private_key(key, password=None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ValueError("the key is of another kind")
        return Authority(x509.load_pem_x509_certificate(certificate), loaded)

    def pem(self) -> IssuedCertificate:
        """Return the authority's own certificate and key."""
        return IssuedCertificate(self.certificate.public_bytes(serialization.Encoding.PEM), _key_pem(self.key))

    def issue_client(
        self, organization: str, name: str, days: int, requested: RequestedKey | None = None
    ) -> IssuedCertificate:
        """Issue a certificate for a worker, the server or the monitor, for a requested key or for a new one."""
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
        return self._issue(organization, name, days, usage, requested=requested)

    def issue_broker(self, organization: str, hosts: Sequence[str], days: int) -> IssuedCertificate:
        """Issue a certificate for a broker with these host names and addresses."""
        names = [x509.DNSName(host) if is_name(host) else x509.IPAddress(ipaddress.ip_address(host)) for host in hosts]
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        return self._issue(organization, hosts[0], days, usage, x509.SubjectAlternativeName(names))

    def _issue(
        self,
        organization: str,
        name: str,
        days: int,
        *extensions: x509.ExtensionType,
        requested: RequestedKey | None = None,
    ) -> IssuedCertificate:
        key = ec.generate_private_key(ec.SECP256R1()) if requested is None else None
        end = min(datetime.now(UTC) + timedelta(days=days), self.certificate.not_valid_after_utc)
        public = key.public_key() if key is not None else requested
        assert public is not None
        builder = _builder(_name(organization, name), self.certificate.subject, public, self.key, end)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs_others=False), critical=True)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        return IssuedCertificate(
            certificate.public_bytes(serialization.Encoding.PEM), b"" if key is None else _key_pem(key)
        )

    def revocation_list(self, serials: Iterable[int]) -> bytes:
        """Sign a revocation list that is valid as long as the authority: an expired one would lock everybody out."""
        now = datetime.now(UTC)
        builder = x509.CertificateRevocationListBuilder(
            self.certificate.subject, now - _BACKDATED, self.certificate.not_valid_after_utc
        )
        builder = builder.add_extension(_signer(self.key), critical=False)
        builder = builder.add_extension(x509.CRLNumber(int(now.timestamp() * 1000)), critical=False)
        for serial in serials:
            entry = x509.RevokedCertificateBuilder(serial_number=serial, revocation_date=now)
            builder = builder.add_revoked_certificate(entry.build())
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def identity_of(certificate: bytes) -> Identity:
    """Return the owner and the dates of a PEM certificate; ValueError if it is not one."""
    found = x509.load_pem_x509_certificate(certificate)
    organization, name = (
        "".join(str(each.value) for each in found.subject.get_attributes_for_oid(oid)[:1])
        for oid in (NameOID.ORGANIZATION_NAME, NameOID.COMMON_NAME)
    )
    begins, ends = found.not_valid_before_utc.isoformat(), found.not_valid_after_utc.isoformat()
    return Identity(name, organization, begins, ends, found.fingerprint(hashes.SHA256()))


def read_request(path: Path) -> RequestedKey:
    """Return the public key of a PEM certificate signing request; names in the request have no effect."""
    try:
        if not path.is_file():  # a device never ends, and a pipe may never begin
            raise ValueError("there is no such file")
        with path.open("rb") as file:
            request = x509.load_pem_x509_csr(file.read(_MOST_REQUEST_BYTES))
        key = request.public_key()
        signed = request.is_signature_valid
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise UserError(
            f"{path} is not a certificate signing request ({error}). Make one on the device: {MAKE_REQUEST}",
            code="unreadable-file",
        ) from error
    small = isinstance(key, rsa.RSAPublicKey) and key.key_size < _LEAST_RSA_BITS
    unusual = isinstance(key, ec.EllipticCurvePublicKey) and not isinstance(key.curve, _CURVES)
    if not signed or small or unusual or not isinstance(key, RequestedKey):
        raise UserError(
            f"The key of {path} cannot be used. Allowed: P-256, P-384, P-521, Ed25519, or RSA of at least "
            f"{_LEAST_RSA_BITS} bits, in a request that it signed.",
            code="unreadable-file",
        )
    return key


def keys_of(certificates: bytes) -> list[RequestedKey]:
    """Return the public keys of concatenated PEM certificates of workers."""
    keys = (certificate.public_key() for certificate in x509.load_pem_x509_certificates(certificates))
    return [key for key in keys if isinstance(key, RequestedKey)]


def serials(certificates: bytes) -> list[int]:
    """Return the serial numbers of concatenated PEM certificates."""
    return [certificate.serial_number for certificate in x509.load_pem_x509_certificates(certificates)]


def is_name(host: str) -> bool:
    """Return whether a host is given by name, not by address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: RequestedKey,
    signer: ec.EllipticCurvePrivateKey,
    end: datetime,
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder(
        issuer, subject, key, x509.random_serial_number(), datetime.now(UTC) - _BACKDATED, end
    )
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    return builder.add_extension(_signer(signer), critical=False)


def _signer(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _name(organization: str, common: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization[:_LONGEST_NAME]),
            x509.NameAttribute(NameOID.COMMON_NAME, common[:_LONGEST_NAME]),
        ]
    )


def _usage(signs_others: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_others, key_cert_sign=signs_others, crl_sign=signs_others,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
