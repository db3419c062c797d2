// SPDX-License-Identifier: Apache-2.0
// A table that is wider than its page says so.
const mark = () => {
  for (const box of document.querySelectorAll(".table-wrapper")) {
    box.classList.toggle("scrolls", box.scrollWidth > box.clientWidth + 1);
  }
};
addEventListener("load", mark);
addEventListener("resize", mark);
