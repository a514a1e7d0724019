"""``python -m cache_backend.server`` is ``hetrec-ps``."""

import sys

from cache_backend.server.main import main

sys.exit(main())
