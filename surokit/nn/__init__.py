"""This part has the layers that hold a recipe: Linear and the pieces of a decoder around it.

linear.py        Linear: a layer with a recipe, a stored weight, an adapter
linear_gemms.py  its three products, and what each operand is quantized to
experts.py       the experts of a layer of transformers: an ExpertsLinear for each of their weights
loftq.py         first values of adapters that begin with what quantizing a weight lost
drawn.py         first values of adapters that have no memory yet
gathered.py      a weight of a sharded model, gathered as codes
delayed.py       amax histories of delayed scaling, for all layers of a model
stages.py        a norm or a gate and the layers that read it, as one operation; prologues.py: what the layers read
grouping.py      which layers of a stage share codes and products: the plan of a stage, which is kept
joint.py         weights of siblings side by side in memory; weight_cache.py: codes of frozen weights
fusion.py        which fusion holds for a module
evaluating.py    evaluation mode for a while
norm.py, qk.py, rope.py, attention.py, swiglu.py, loss.py: the pieces of a decoder
"""
