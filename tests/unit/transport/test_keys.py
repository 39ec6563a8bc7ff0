"""Keys that follow from a job's secret."""

import pytest

from msrun.transport.keys import SECRET_BYTES, hkdf, key_pair, new_secret

SECRET = bytes(range(32))


# RFC 5869, appendix A.1 to A.3: input key, salt, info, length, output key.
@pytest.mark.parametrize(
    ("secret", "salt", "info", "expected"),
    [
        (
            "0b" * 22,
            "000102030405060708090a0b0c",
            "f0f1f2f3f4f5f6f7f8f9",
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            bytes(range(0x50)).hex(),
            bytes(range(0x60, 0xB0)).hex(),
            bytes(range(0xB0, 0x100)).hex(),
            (
                "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac78272"
                "71cb41c65e590e09da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87"
            ),
        ),
        (
            "0b" * 22,
            "",
            "",
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
)
def test_hkdf_gives_the_vectors_of_its_rfc(secret, salt, info, expected):
    output = hkdf(
        bytes.fromhex(secret),
        bytes.fromhex(info),
        salt=bytes.fromhex(salt),
        length=len(expected) // 2,
    )

    assert output.hex() == expected


def test_everyone_with_the_secret_gets_the_same_pair():
    assert key_pair(SECRET, "agent") == key_pair(bytes(SECRET), "agent")


def test_the_pair_of_a_role_stays_what_it_is():
    # Nodes of one job may run different releases: a change here cuts them off.
    assert key_pair(SECRET, "agent").public == b"agJ0F&2Nb8aX(>3-V^@J:Y#*u)kHZX/#>Lmu?WVE"
    assert key_pair(SECRET, "scheduler").public == b"yDPNm39]XtVg-liuaioIxUkn89YgK:r-/p54aFbQ"


def test_roles_and_secrets_have_pairs_of_their_own():
    pairs = [key_pair(s, r) for s in (SECRET, bytes(32)) for r in ("agent", "control", "scheduler")]

    assert len({pair.public for pair in pairs}) == 6
    assert len({pair.secret for pair in pairs}) == 6


def test_secrets_are_fresh_and_long():
    assert {len(new_secret()) for _ in range(2)} == {SECRET_BYTES}
    assert new_secret() != new_secret()
