"""What this machine does in a second, measured on all ranks at once: ``shardbook doctor --calibrate``.

clock      one measurement: all ranks begin together, and each takes its first quartile
compute    products, passes, attention, loss, embedding, optimizers
links      between ranks, and between device and host
disk       direct I/O
overhead   what an operator and a unit cost beside their work
run        all of it, as one document
"""
