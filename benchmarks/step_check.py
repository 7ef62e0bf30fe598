def check(o): return []
