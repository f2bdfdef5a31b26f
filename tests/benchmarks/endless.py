"""Prints what it has found and does not end."""

import json
import time

print("first a line", json.dumps({"batch": 0}), flush=True)
print(json.dumps({"batch": 1}), flush=True)
time.sleep(60)
