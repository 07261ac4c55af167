"""The models that ``shardbook train`` builds: a Llama-style decoder of our own, and local transformers classes.

Every model here keeps one contract: ``model(inputs, targets)`` takes two ``[batch, sequence]`` tensors of token numbers and
returns ``(loss_sum, num_tokens)``: the summed fp32 cross-entropy and the number of targets that count.
"""
