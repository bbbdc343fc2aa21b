"""What each optimisation brings: the engine with it and without, in turns.

`parts` lists them with their switches, `loads` what the engine is given to do, `worker` is a
process that holds one engine, and `turns` starts two of them for each part, which take turns.
"""
