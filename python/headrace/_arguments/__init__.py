"""What each argument may be, checked here and only here, before anything is converted.

`tables` says what each argument takes, `kinds` what an integer or a size is, `prompts` what may be a prompt. A wrong value is a
`ValueError`, a wrong type a `TypeError`; both name the argument, what was given, and what is allowed:
`top_p = 0: must be above 0 and at most 1`.
"""
