"""The notebook behind ``shardbook explore``: knobs, pictures, a lesson, and small real runs. Only ``app.py`` knows marimo."""
