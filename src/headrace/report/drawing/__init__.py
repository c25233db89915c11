"""Pictures as SVG text: bars, histograms, lanes and curves, with a value under the pointer."""
