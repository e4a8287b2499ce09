"""Laws of a codec."""

from __future__ import annotations

import numpy as np

from cbdsl import register
from cbdsl.arrays import Floats
from cbdsl.codecs.codec import Codec, CodecError
from cbdsl.testing.laws import Laws, is_floats, is_identical, make_part

_SIZES = (1, 7, 300, 1000)


def check_codec(codec: Codec | type[Codec] | str) -> None:
    """Fail unless a codec gives the same bytes and the same model every time, and a CodecError for invalid bytes.

    It is tested with differences of any magnitude, with none, with numbers that are not finite, and with forged bytes.

    >>> check_codec("q4")
    """
    part, laws = make_part(register.codec, codec)
    laws.require(isinstance(part, Codec), "it extends cbdsl.Codec", f"It is a {type(part).__name__}.")
    for size in _SIZES:
        rng = np.random.default_rng(size)
        reference = rng.normal(size=size).astype(np.float32)
        cases = {
            "with small differences": reference + np.float32(1e-3) * rng.normal(size=size).astype(np.float32),
            "with differences of any magnitude": reference
            + (rng.normal(size=size) * 10.0 ** rng.uniform(-9, 3, size)).astype(np.float32),
            "with no difference": reference.copy(),
        }
        for case, model in cases.items():
            _check_round_trip(part, laws, f"{case}, {size} numbers", model, reference)
        _check_forged(part, laws, cases["with small differences"], reference)
        broken = reference.copy()
        broken[0] = np.nan
        with laws.expect_no_error("where a number is NaN"):
            pack, _ = part.transmit_one(broken, reference)
        laws.require(
            len(pack) <= part.longest_pack(size), "no pack exceeds `longest_pack`", f"NaN made {len(pack)} bytes."
        )


def _check_round_trip(codec: Codec, laws: Laws, case: str, model: Floats, reference: Floats) -> None:
    given = model.copy(), reference.copy()
    with laws.expect_no_error(case), np.errstate(all="ignore"):
        content, again = codec.encode(model, reference), codec.encode(model, reference)
        pack = codec.pack(model, reference)
        decoded = codec.decode(content, reference)
        sent = codec.transmit(model[None], reference, None)
        closed = codec.encode_pack(sent.packs[0], len(reference)) if codec.relative else content
    laws.require_unchanged(
        {"the model": given[0], "the reference": given[1]}, {"the model": model, "the reference": reference}
    )
    laws.require(isinstance(content, bytes) and content == again, "equal models give equal bytes", f"Not so {case}.")
    longest = codec.longest_pack(len(reference))
    laws.require(len(pack) <= longest, "no pack exceeds `longest_pack`", f"{len(pack)} bytes, {longest} at most.")
    fits = is_floats(decoded) and decoded.dtype == np.float32 and decoded.shape == reference.shape
    laws.require(fits, "it decodes to float32 numbers (D,)", f"{case.capitalize()}: {decoded.dtype} {decoded.shape}.")
    laws.require(
        is_identical(decoded, sent.models[0]) and is_identical(decoded, codec.decode(closed, reference)),
        "what is scored is what arrives, to the bit",
        f"{case.capitalize()}, `sent` and `decode` differ.",
    )


def _check_forged(codec: Codec, laws: Laws, model: Floats, reference: Floats) -> None:
    rng = np.random.default_rng(1)
    content = codec.encode(model, reference)
    for _ in range(60):
        forged = bytearray(content[: rng.integers(0, len(content) + 1)] + rng.bytes(int(rng.integers(0, 9))))
        if forged:
            forged[rng.integers(len(forged))] = rng.integers(256)
        try:
            found = codec.decode(bytes(forged), reference)
        except CodecError:
            continue
        except Exception as error:
            law = "forged bytes are a CodecError, or a model"
            raise AssertionError(f"The {laws.kind} {laws.part} breaks a law: {law}. It raises {error!r}") from error
        laws.require(found.shape == reference.shape, "forged bytes are a CodecError, or a model", f"{found.shape}.")
