"""Terms that losses and settings of objectives share. The module loads no jax."""

import math
from typing import Literal

Mean = Literal["examples", "tokens"]
Direction = Literal["reverse", "forward"]
# A token carries the behavior where fine-tuning made it likelier by this factor; in nats. It is
# gone at the share ENOUGH of its way back (docs/studies/own_model.md), or where it fell by a factor
# of four, however far the base is. So its way ends at a length of which that is this share.
LEAST_CARRIED = math.log(2.0)
ENOUGH = 0.4
LONGEST_WAY = math.log(4.0) / ENOUGH
