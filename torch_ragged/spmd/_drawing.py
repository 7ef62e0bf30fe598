def draw_svg(*a):
    return ""
