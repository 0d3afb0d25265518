"""Says that it has begun, by its name, and sleeps: a probe that hangs."""

import time
from pathlib import Path

Path("/proc/self/comm").write_text("sleeper")
time.sleep(120)
