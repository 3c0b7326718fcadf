"""Figures by matplotlib, which is imported only once one is drawn."""
