"""The recorder's only logger: whatever it cannot do is logged there as one line."""

import logging

log = logging.getLogger("crossrank")
