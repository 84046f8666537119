"""Measure what a model costs to serve, behind any server that speaks OpenAI's HTTP interface.

workload.py     what is asked: how many requests of how many tokens, arriving how
prompts.py      texts of a wanted number of the server's tokens
stream.py       an answer as it comes: server-sent events, chunks, tokens, when
client.py       one request and its Answer; bounded connections, time limits
driving.py      a workload sent to a server, with progress and the client's own delay
bench.py        serve_bench(): one workload or a sweep, kept in a folder
progress.py     what is shown meanwhile
measures.py     time to the first token and the others, by one definition each
point.py        one workload on one server: answers, and their figures
planned.py      the same as a plan predicts it
served.py       ServeBench, the result: table, saturation, cost
picture.py      distributions, sweeps
starting.py     ServerProcess: a server as long as a block
brought.py      result files of other clients, in the same definitions
"""
