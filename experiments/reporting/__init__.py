"""Parts of the stability report: reading runs, measuring them, drawing, and laying out the page."""
