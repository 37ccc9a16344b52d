"""What every process of Weft needs: its start, its log, its signs of life, its end."""
