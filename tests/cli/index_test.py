"""What `raslik index` refuses before it looks at an index; what it does is in query_test.py."""

import pytest

from raslik_jax.cli import index
from raslik_jax.settings import SettingsError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "sign", "center": True}, "--dtype needs --compact_to: it is of the copy"),
        ({"center": True, "verify": True}, "--center needs --compact_to: it is of the copy"),
        ({"repair": True, "compact_to": "y"}, "--repair and --compact_to must be given apart: "),
    ],
)
def test_flags_that_would_not_act_together_are_refused(given, message):
    with pytest.raises(SettingsError, match=f"^{message}"):
        index.Options(index="x", **given)
