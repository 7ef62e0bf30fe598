def add_options(p): pass
def predict_all(o): return []
