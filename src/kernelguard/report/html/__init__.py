"""Pages to look at: one self-contained HTML file each, with inline styles and scripts and no network."""
