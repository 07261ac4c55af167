"""The ZeRO engine. Read it in this order: residency, layout, storage, comm, unit, schedule, hooks, engine."""
