"""The main job: a recipe, real text, local ranks, the training loop, and the plain loop beside it.

recipe     what is asked for, and where each value came from
text       bytes of real text;  batches: which of them make each micro-batch
launch     starts the ranks, or joins ranks that are there;  rank: what one of them runs
loop       trains;  baseline: the plain loop it is compared with, bit for bit
"""
