// The site's search: recipes first, then users' pages, and pages of maintainers last. Only the function score is ours: Sphinx
// takes the other values, its own, from here if there is a file like this one.
var Scorer = {
  score: ([page, title, anchor, description, score, file, kind]) => {
    if (kind === "index") return score; // "Also called" below a heading: 100 if it is the whole query, before all others.
    if (page === "recipes") return score + (anchor ? 60 : 10); // A public name has 16: it is found before the text of a page.
    const isForMaintainers =
      /^(design|code_map|upstream|mutants|op_coverage|fsdp2_tests|compatibility|changelog|reliability|simulation|hopper)/;
    return isForMaintainers.test(page) ? score - 20 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
