// Runs before anything is drawn, so that a chosen theme does not flash. Not a module for that reason.
try {
  const theme = localStorage.getItem("cellar.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is forbidden: the system's theme it is.
}
