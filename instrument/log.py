"""The recorder's only logger: what it cannot do is one line there."""

import logging

log = logging.getLogger("crossrank")
